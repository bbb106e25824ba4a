"""Other systems' own plug-in interfaces, filled by rl-ckpt. Each is loaded by that system, in its process."""
