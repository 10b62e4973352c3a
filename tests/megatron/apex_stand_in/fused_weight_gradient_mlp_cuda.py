"""apex's kernels that add a linear weight's gradient to a sum; they take arguments by position."""


def wgrad_gemm_accum_fp32(input_2d, d_output_2d, d_weight, /):
    d_weight += (d_output_2d.T @ input_2d).float()


def wgrad_gemm_accum_fp16(input_2d, d_output_2d, d_weight, /):
    d_weight += d_output_2d.T @ input_2d
