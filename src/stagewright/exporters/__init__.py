"""A plan as the configuration of another trainer: torchtitan, Megatron-LM, Accelerate, DeepSpeed, torchrun."""
