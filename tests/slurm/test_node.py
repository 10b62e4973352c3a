import pytest

from nemorl.slurm.errors import SlurmError
from nemorl.slurm.node import read_allocation

LISTS = {"n[1-2]": ["n1", "n2"], "c7": ["c7"]}
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2"}


def test_nodes_stand_in_slurms_order_and_the_first_is_the_head() -> None:
    allocation = read_allocation(JOB, LISTS.__getitem__)

    assert allocation.nodes == ("n1", "n2")
    assert allocation.rank == 1
    assert allocation.start == "12.0"
    assert allocation.part("n1") is None


def test_a_restart_and_a_step_by_hand_have_folders_of_their_own() -> None:
    allocation = read_allocation({**JOB, "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "1"}, LISTS.__getitem__)

    assert allocation.start == "12.2.1"


def test_the_second_component_of_a_heterogeneous_job_needs_no_gpus() -> None:
    variables = {
        "SLURM_JOB_ID": "12",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "c7",
        "SLURM_JOB_NODELIST": "c7",  # of its own component, as a step sees it
        "SLURMD_NODENAME": "c7",
    }

    allocation = read_allocation(variables, LISTS.__getitem__)

    assert allocation.nodes == ("n1", "n2", "c7")
    assert allocation.rank == 2
    assert [allocation.part(node) for node in allocation.nodes] == ["gpu", "gpu", "cpu"]


def test_what_the_batch_script_found_out_needs_no_command_of_slurms() -> None:
    """In a container there is none, and the second component's job has another number."""
    variables = {
        "SLURM_JOB_ID": "13",
        "NEMORL_JOB": "12",
        "NEMORL_NODES": "n1,n2;c7",
        "SLURMD_NODENAME": "c7",
    }

    allocation = read_allocation(variables)

    assert allocation.components == (("n1", "n2"), ("c7",))
    assert allocation.start == "12.0"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({"SLURMD_NODENAME": "n9"}, "SLURMD_NODENAME is n9, and the nodes of job 12 are n1, n2"),
        ({"SLURMD_NODENAME": ""}, "SLURMD_NODENAME is not set"),
        (
            {"SLURM_JOB_NODELIST": ""},
            "SLURM_JOB_NODELIST, in which Slurm lists the nodes of a job, is not set",
        ),
    ],
)
def test_outside_of_a_job_it_says_what_is_missing(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(SlurmError, match=problem):
        read_allocation({**JOB, **changes}, LISTS.__getitem__)
