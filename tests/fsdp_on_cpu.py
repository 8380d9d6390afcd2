"""`cirkit`, sharded by FSDP on CPUs: accelerate shards on accelerators alone, so it is told that these processes have some.

    ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes 2 tests/fsdp_on_cpu.py train ...
"""
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState

from cirkit.report.cli import main

begin = AcceleratorState.__init__


def sharded(self, *args, **more):
    begin(self, *args, **more)
    self.distributed_type = DistributedType.FSDP
    self.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen2_5_VLDecoderLayer"])


if __name__ == "__main__":
    AcceleratorState.__init__ = sharded
    main()
