"""Messages of the weight exchange as JSON, between a replica's process and vLLM's workers."""

from pydantic import TypeAdapter

from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout
from nemorl.weights.session import RefitSession

PARTS = TypeAdapter(tuple[Part, ...])
LAYOUT = TypeAdapter(ReceiverLayout)
SESSION = TypeAdapter(RefitSession)
REPORT = TypeAdapter(ReceiveReport)
