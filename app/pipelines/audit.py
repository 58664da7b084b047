"""`flywheel train --audit`: what a run was trained on, from what the registry and its last checkpoint say."""

from actors.data.version import load
from actors.registry.reader import read_state
from actors.registry.views import run as find_run
from actors.training.audit import audit_run
from actors.training.config import TrainConfig
from actors.training.ledger import Audit
from cluster.config import parse
from cluster.errors import ConfigError
from cluster.storage import Home


def audit(run_id: str, home: Home) -> Audit:
    """Of any run that has a checkpoint, also one that is going on; needs no Ray.

    `RequestError` (404) if the registry knows no such run, `ConfigError` if it has no checkpoint or its data is gone.
    """
    fact = find_run(read_state(home), run_id).run
    if fact.data_version is None:
        raise ConfigError(
            f"Run {run_id} was not trained on a data version.", hint="There is nothing to hold it against."
        )
    settings = {key: value for key, value in fact.recipe.items() if key in TrainConfig.model_fields}
    config = parse(TrainConfig, settings, source=f"run {run_id}")
    return audit_run(run_id, config, load(home, fact.data_version), home)
