"""A Triton backend for the CPU that compiles nothing: under TRITON_INTERPRET=1 kernels are interpreted.

vLLM asks only whether there is a backend for its platform; with one it takes its V2 runner, which alone passes
captured states between pipeline stages. Source: vLLM 0.32.0, triton_utils/importing.py; triton 3.9, backends/.
"""

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    """Answers that it is there; asked to compile, it says that it cannot."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreted"

    def parse_options(self, options):
        raise NotImplementedError("kernels are interpreted here")

    def add_stages(self, stages, options, language):
        raise NotImplementedError("kernels are interpreted here")

    def load_dialects(self, context):
        return None

    def get_module_map(self):
        return {}
