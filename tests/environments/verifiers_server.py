"""The environment server of verifiers with the task set of verifiers_sums.py: verifiers_server.py PORT"""

import sys

from verifiers.v1.serve import serve_env

if __name__ == "__main__":
    serve_env(
        address=f"tcp://127.0.0.1:{sys.argv[1]}",
        max_workers=1,
        config_data={"taskset": {"id": "verifiers-sums"}, "agent": {"runtime": {"type": "subprocess"}}},
    )
