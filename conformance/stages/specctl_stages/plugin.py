"""Leaves asynchronous scheduling as vLLM sets it: its CPU platform turns it off, and the V2 runner's stages need it."""

from vllm.platforms.cpu import CpuPlatform


def register():
    """Called by vLLM in each of its processes."""
    original = CpuPlatform.check_and_update_config.__func__
    if original.__name__ == "keep_scheduling":
        return

    def keep_scheduling(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(keep_scheduling)
