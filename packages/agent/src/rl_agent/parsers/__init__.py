"""Tool-call parsers, one per family of models; found by the entry points `rl_agent.parsers`.

A parser is a function from the text of a turn (special tokens included, the final stop token not) to a `ParsedTurn`. It
raises nothing: a call that cannot be read becomes a `ToolCall` with an `error` for the model.
"""
