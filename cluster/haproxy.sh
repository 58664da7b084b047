#!/bin/sh
# What Ray Serve starts as its HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH): mends the configuration that Ray has written
# before every start and reload, and becomes HAProxy. Four things Ray 2.60 has no setting for:
#
# - the statistics listen on all interfaces, on ports that two clusters of one machine would fight for: here they are
#   sockets in this cluster's own folder;
# - the admin socket may be written by everybody: here by its owner;
# - an error of HAProxy's own is a 500 of plain text: here it is a 503 in OpenAI's shape, and says when to ask again;
# - with splicing, HAProxy 2.8 does not see that a client hangs up while its request is on a connection that has been
#   used before, so that a whole answer is generated for nobody: here nothing is spliced.
#
# A line that Ray writes otherwise one day is left as it is. Delete when Ray can be told the four.
set -eu

config=
before=
for word in "$@"; do
    if [ "$before" = "-f" ]; then config=$word; fi
    before=$word
done

if [ -n "$config" ]; then
    folder=$(dirname "$config")
    message='{"error":{"message":"No gateway is there to answer. One is being started.","type":"server_error","param":null,"code":"overloaded"}}'
    printf 'HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nContent-Length: %s\r\nConnection: close\r\n\r\n%s' \
        "${#message}" "$message" > "$folder/away.http"
    sed -i \
        -e "/^listen stats/,\$ s|^\( *bind \)\*:.*|\1unix@$folder/stats.sock mode 600|" \
        -e "/^frontend prometheus/,/^frontend http_frontend/ s|^\( *bind \):.*|\1unix@$folder/prometheus.sock mode 600|" \
        -e "s|^\( *stats socket .*\) mode 666 |\1 mode 600 |" \
        -e "/^ *option splice-/d" \
        -e "s|^\( *errorfile [0-9]* \).*|\1$folder/away.http|" \
        -e "s|^\( *http-request return status \)404 content-type text/plain lf-string .*|\1503 content-type application/json hdr retry-after 5 string '$message'|" \
        "$config"
fi
exec "$FLYWHEEL_HAPROXY" "$@"
