"""Give this Python packages that only have a name.

    empty_distribution.py [--rename NAME==VERSION] NAME==VERSION...

`--rename` gives an installed package another version, as NVIDIA's build of torch has one that no index has.
"""

import argparse
import sysconfig
from importlib import metadata
from pathlib import Path


def create(name: str, version: str, site: Path) -> None:
    """Add the metadata of a package without modules."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("stand-in\n")
    (folder / "RECORD").write_text("")


def rename(name: str, version: str) -> None:
    """Give an installed package another version."""
    distribution = metadata.distribution(name)
    old = distribution.version
    folder = Path(str(distribution.locate_file(""))) / f"{name}-{old}.dist-info"
    text = (folder / "METADATA").read_text(encoding="utf-8")
    (folder / "METADATA").write_text(
        text.replace(f"Version: {old}", f"Version: {version}", 1), encoding="utf-8"
    )
    folder.rename(folder.with_name(f"{name}-{version}.dist-info"))


def main() -> None:
    """Create and rename the packages of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rename", action="append", default=[])
    parser.add_argument("packages", nargs="*")
    arguments = parser.parse_args()
    for one in arguments.rename:
        rename(*one.split("=="))
    for one in arguments.packages:
        create(*one.split("=="), Path(sysconfig.get_paths()["purelib"]))


if __name__ == "__main__":
    main()
