"""Operations on global tensors that OneFlow 0.9.0 refuses or computes wrongly."""
