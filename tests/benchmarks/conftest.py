import sys
from pathlib import Path

# Benchmarks import each other as they do when they run as scripts.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
