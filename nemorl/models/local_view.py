"""Where the elements of a slice lie in memory."""

from collections.abc import Mapping

from torch import Tensor

from .slices import TensorSlice


def local_view(parameters: Mapping[str, Tensor], part: TensorSlice) -> Tensor:
    """The elements of a slice, of shape `part.size`, as a view into its holder's parameter.

    Raises ValueError where the holder has no such parameter or it ends before the slice does.
    """
    parameter = parameters.get(part.param)
    if parameter is None:
        raise ValueError(f"{part.name}: there is no local parameter {part.param!r} to hold it")
    last = part.offset + sum((n - 1) * stride for n, stride in zip(part.size, part.strides, strict=True))
    if last >= parameter.numel():
        raise ValueError(
            f"{part.name}: the slice reaches element {last} of {part.param!r}, which has only "
            f"{parameter.numel()} elements (shape {tuple(parameter.shape)}); model and layout do not agree"
        )
    return parameter.detach().as_strided(part.size, part.strides, parameter.storage_offset() + part.offset)
