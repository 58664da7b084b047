"""Which files are mined and who ships them."""

from actors.data.installed import STANDARD_LIBRARY, group_by_shipping, installed_files


def test_what_is_shipped_together_or_under_one_name_is_one_group() -> None:
    shipped = [
        ("torch", "torch"), ("torch", "torch"), ("torchgen", "torch"),
        ("mlflow", "mlflow"), ("mlflow", "mlflow-skinny"), ("mlflow", "mlflow"),
        ("yaml", "pyyaml"),
    ]  # fmt: skip
    assert group_by_shipping(shipped) == {"torch": "torch", "torchgen": "torch", "mlflow": "mlflow", "yaml": "pyyaml"}


def test_installed_files_know_their_distribution_and_skip_tests_and_copies() -> None:
    files = {file.name: file for file in installed_files()}
    assert files["pydantic/main.py"].package == "pydantic"
    assert files["pydantic/main.py"].version.startswith("2.")
    assert files["yaml/__init__.py"].package == files["yaml/__init__.py"].group == "pyyaml"
    assert files[f"{STANDARD_LIBRARY}/json/decoder.py"].group == STANDARD_LIBRARY
    assert list(files) == sorted(files)
    assert not [name for name in files if {"_vendor", "tests", "conftest.py"} & set(name.split("/"))]
