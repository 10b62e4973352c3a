"""What is stored of a step's training is what was trained."""

import numpy as np
import pytest

from nemorl.config.policy import AdamConfig
from nemorl.data.trained import read_trained
from tests.megatron.cases import recorded
from tests.megatron.examples import layout, policy_config, ragged_batch

LAYOUTS = {
    "one": layout(),
    "TP2": layout(tp=2),
    "PP2-VPP2": layout(pp=2, vpp=2),
    "CP2-DP2": layout(cp=2, dp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logprobs_advantages_and_masks_of_a_step(pool, model, tmp_path, name):
    where = LAYOUTS[name]
    # Weights that hardly change: the logprobs of the second minibatch are those of before the first.
    config = policy_config(model("llama")[1], layout=where, optimizer=AdamConfig(lr=1e-12))
    batch = ragged_batch()
    results = pool.run(where.world_size, recorded, config, batch, tmp_path)
    found = 0
    assert len(list(tmp_path.iterdir())) == where.data_parallel_size
    for copy in range(where.data_parallel_size):
        mine, before, trained = results[copy * where.tensor_parallel_size * where.context_parallel_size]
        for number, (start, end) in enumerate(zip(mine.cu_seqlens[:-1], mine.cu_seqlens[1:], strict=True)):
            arrays = read_trained(tmp_path, 7, f"{copy}/{number}")
            span = slice(int(start), int(end))
            mask = (mine.loss_mask & (mine.weights > 0))[span].numpy()
            assert np.array_equal(arrays["mask"], mask)
            assert np.array_equal(arrays["advantages"], mine.advantages[span].numpy())
            np.testing.assert_allclose(arrays["logprobs"], before[span].numpy(), rtol=1e-5, atol=1e-6)
            gaps = np.abs(arrays["logprobs"] - mine.logprobs[span].numpy())[mask]
            if mask.any():
                assert trained[number].logprob_gap == pytest.approx(gaps.mean(dtype=np.float64), abs=1e-6)
            assert trained[number].num_tokens == mask.sum()
            found += 1
    assert found == batch.num_sequences


def test_a_file_that_cannot_be_written_is_a_problem_and_no_error(pool, model, tmp_path):
    (tmp_path / "file").touch()
    config = policy_config(model("llama")[1], layout=layout())
    with pytest.raises(AssertionError, match=r"file/step_000007-trained-0\.safetensors"):
        pool.run(1, recorded, config, ragged_batch(), tmp_path / "file")
