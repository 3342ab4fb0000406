"""fused_decode: convolution, recurrence and gated norm of one token a row."""
