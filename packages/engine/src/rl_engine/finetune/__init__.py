"""Training programs on one engine: SFT, preferences, reward models, distillation."""
