"""The strategy's arguments as users of the method have them in their files."""

# The keys are an interface: users of the method have them in their files, spelled like this.
INIT_ARGS = """\
recompute: true
recompute_plan:
  apply_modules:
    - model.visual.blocks.{*}
    - model.language_model.layers.{*}
enable_activation_offload: true
activation_offload_plan:
  apply_modules:
    - model.visual.blocks.{*}
    - model.language_model.layers.{*}
enable_chunk_mbs: true
chunkmbs_plan:
  apply_modules:
    - model.language_model.layers.{*}
  chunk_mbs: 2            # samples per chunk, not the number of chunks
  batch_dim: 0            # 0 for [b, s, h], 1 for [s, b, h]
  chunk_arg_indexs: [0]
  chunk_kwarg_names: ["position_embeddings", "position_ids", "rope_deltas", "attention_mask"]
"""
