"""A language model fed with packed rows: attention, log-probs, experts, images, adapters."""
