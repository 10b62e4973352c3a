"""Names of devices. Each worker of a replica has one of its own; `device_id` is its number."""


def get_device_uuid(device_id: int) -> str:
    return f"GPU-standin-{device_id}"
