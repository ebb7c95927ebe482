"""Advantages, losses, KL estimators and filters: pure functions of tensors."""
