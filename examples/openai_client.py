"""A chat and a completion with OpenAI's package.

.venv/bin/python examples/openai_client.py --base-url http://127.0.0.1:8000/v1
"""

import argparse

from openai import OpenAI


def main() -> None:
    """Stream an answer, then complete a prompt, each with a seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    with OpenAI(base_url=options.base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        with client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Read all lines of a file."}],
            max_tokens=options.max_tokens,
            seed=7,
            stream=True,
        ) as stream:
            for chunk in stream:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        completion = client.completions.create(
            model=model, prompt="def fib(n):", seed=7, max_tokens=options.max_tokens
        )
        print(f"\n\ndef fib(n):{completion.choices[0].text}")


if __name__ == "__main__":
    main()
