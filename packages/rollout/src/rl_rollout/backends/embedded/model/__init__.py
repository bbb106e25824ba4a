"""The served model: layers, attention over the paged cache, adapters, weights, forward pass."""
