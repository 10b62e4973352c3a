"""`nemorl push`: upload an exported model to the Hugging Face hub."""

from argparse import Namespace
from pathlib import Path

from .terminal import Commands, ExitCode, add_command, say


def register(commands: Commands) -> None:
    push = add_command(commands, "push", _push, "upload an exported model to the Hugging Face hub")
    push.add_argument("place", type=Path, metavar="FOLDER", help="exported folder, or a run that has hf/")
    push.add_argument("repository", metavar="REPO_ID", help="ORG/NAME; created unless it exists")
    push.add_argument("--private", action="store_true", help="make a new repository private")
    push.add_argument("--revision", metavar="BRANCH", help="branch, created unless it exists (default: main)")
    dry_run_help = "list what would be uploaded, without a network"
    push.add_argument("--dry-run", action="store_true", help=dry_run_help)


def _push(arguments: Namespace) -> int:
    from nemorl.run.push import plan_push, push

    plan = plan_push(arguments.place, arguments.repository)
    for path in plan.files:
        say(f"{path.stat().st_size:>16,}  {path.relative_to(plan.folder)}")
    total = f"{len(plan.files)} files, {plan.num_bytes / 1e9:.3f} GB, to {plan.repository}"
    if arguments.dry_run:
        say(f"{total}; nothing was uploaded (--dry-run)")
        return ExitCode.WELL
    say(total)
    say(f"pushed: {push(plan, private=arguments.private, revision=arguments.revision)}")
    return ExitCode.WELL
