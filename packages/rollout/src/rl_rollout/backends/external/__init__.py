"""Third-party inference servers: vLLM, SGLang and TensorRT-LLM as subprocesses, and any OpenAI-compatible URL."""
