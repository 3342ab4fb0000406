"""packed_decode: one recurrence step a row from a packed row after the convolution."""
