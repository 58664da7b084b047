from pathlib import Path

from app.bench.homes import beside
from cluster.signing import Keyring, sign, verify
from cluster.storage import Home, digest_folder


def test_homes_beside_a_new_one_sign_with_its_key(tmp_path: Path) -> None:
    """The first command of a new machine may be a benchmark."""
    current = Home(tmp_path / "current")
    first, second = (beside(current, tmp_path / name) for name in ("first", "second"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    sign(model, first)
    verify(model, second, what="a model", digest=digest_folder(model))
    assert Keyring(first).ids() == Keyring(current).ids()


def test_models_of_the_current_home_are_there_and_new_ones_stay_out_of_it(tmp_path: Path) -> None:
    current = Home(tmp_path / "current")
    (current.models / "known").mkdir(parents=True)
    scratch = beside(current, tmp_path / "scratch")
    (scratch.models / "new").mkdir()
    assert sorted(path.name for path in scratch.models.iterdir()) == ["known", "new"]
    assert [path.name for path in current.models.iterdir()] == ["known"]
