"""packed_fused_decode: fused_decode over T >= 1 ragged tokens a sequence, with checkpoints."""
