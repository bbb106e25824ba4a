#!/bin/sh
# Agent clients that the integration tier runs unchanged through rl-agent's proxy, at pinned versions.
# Usage: tools/clients.sh FOLDER; the tests read the folder from RL_CLIENTS.
set -eu
folder=${1:?usage: tools/clients.sh FOLDER}
uv venv -q --allow-existing --python "${PYTHON:-python3.11}" "$folder"
uv pip install -q --compile-bytecode --no-config --python "$folder/bin/python" \
    openai==3.57.0 anthropic==2.14.0 litellm==1.110.2 openai-agents==0.24.0 'pydantic-ai-slim[openai,anthropic]==2.68.0' \
    'smolagents[openai]==1.26.0' mini-swe-agent==2.4.6 langgraph==1.2.24 langchain-openai==1.7.4
npm install --silent --prefix "$folder/node" @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197
node "$folder/node/node_modules/@anthropic-ai/claude-code/install.cjs"
