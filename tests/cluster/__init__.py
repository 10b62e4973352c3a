"""A package, so that pytest ends what the fixtures of this folder share when the folder is done."""
