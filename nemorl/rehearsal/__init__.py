"""The worker code on a pretended accelerator: what a GPU would be asked to do, on a machine without one."""
