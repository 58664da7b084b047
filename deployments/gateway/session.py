"""Which requests belong together: what keeps somebody on one side of an alias whose traffic is split.

The first of these that is given and not empty:

    x-session-id         a header of ours, for a conversation
    prompt_cache_key     OpenAI's word for requests that share a beginning
    safety_identifier    OpenAI's word for an end user
    user                 … and its older one
    the API key          an application whose users are not told apart stays on one side as a whole
    the request          without keys every request is drawn by itself
"""

from starlette.requests import Request

from deployments.gateway.keys import Caller
from deployments.gateway.schemas import SessionBody
from deployments.gateway.scope import trace_of

SESSION_HEADER = "x-session-id"


def session_of(request: Request, body: SessionBody, caller: Caller) -> str:
    """The words by which `registry.snapshot.resolve` chooses; equal for equal sessions, whatever replica is asked."""
    return (
        request.headers.get(SESSION_HEADER)
        or body.prompt_cache_key
        or body.safety_identifier
        or body.user
        or caller.id
        or trace_of(request).request_id
    )
