"""The narrow seam between the model and its kernels: functions on tensors, no model, no cache
policy. The torch code here defines the meaning; a faster kernel must match it."""
