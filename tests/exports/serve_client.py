"""Asks a server through OpenAI's own client, greedily: a chat, the same streamed, a completion. Run by test_serve.py.

python serve_client.py http://localhost:8000/v1 MODEL QUESTION PROMPT
"""

import json
import sys

from openai import OpenAI


def main(url: str, model: str, question: str, prompt: str) -> None:
    client, greedy = OpenAI(base_url=url, api_key="none"), {"temperature": 0.0, "max_tokens": 12}
    said = [{"role": "user", "content": question}]
    whole = client.chat.completions.create(model=model, messages=said, **greedy)
    pieces = client.chat.completions.create(model=model, messages=said, stream=True, **greedy)
    text = client.completions.create(model=model, prompt=prompt, **greedy)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    print(json.dumps({"chat": whole.choices[0].message.content, "streamed": streamed, "text": text.choices[0].text}))


if __name__ == "__main__":
    main(*sys.argv[1:])
