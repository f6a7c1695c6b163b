"""What a user of the `openai` package sees: python openai_client.py URL SCENARIO KEY.

Each scenario checks by assertion and prints what it saw; the exit status says whether all held.
"""

import sys

import openai

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello there, how are you?"}]


def client(url, key):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def answers(api):
    models = [model.id for model in api.models.list()]
    assert models == [MODEL], models
    greedy = {"model": MODEL, "temperature": 0, "max_tokens": 12}

    whole = api.chat.completions.create(messages=HELLO, **greedy)
    assert whole.choices[0].message.role == "assistant", whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage
    chunks = list(
        api.chat.completions.create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **greedy)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason], ends

    whole = api.completions.create(prompt="Once upon a time", **greedy)
    chunks = list(api.completions.create(prompt="Once upon a time", stream=True, **greedy))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text, (text, whole)

    sampled = {"model": MODEL, "temperature": 1, "max_tokens": 8, "seed": 7, "n": 3}
    three = api.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **sampled)
    assert [choice.index for choice in three.choices] == [0, 1, 2], three
    for choice in three.choices:
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content), choice
    streamed = {0: "", 1: "", 2: ""}
    for chunk in api.chat.completions.create(messages=HELLO, stream=True, **sampled):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == [choice.message.content for choice in three.choices], (streamed, three)
    two = api.completions.create(prompt=["one", "two"], **greedy)
    assert [choice.index for choice in two.choices] == [0, 1], two
    print("answers: models, chat, completions, n=3, prompt lists; whole and streamed agree")


def refused(kind, status, words, call):
    """The call must raise exactly this exception, with this status and these words in its message."""
    try:
        result = call()
    except openai.APIStatusError as error:
        assert type(error) is kind, (type(error), error)
        assert error.status_code == status, (error.status_code, error)
        assert all(word in error.message for word in words), (words, error.message)
        assert isinstance(error.body, dict) and error.body.get("message"), error.body
        print(f"{kind.__name__} {status}: {error.body['message']}")
    else:
        raise AssertionError(f"{kind.__name__} expected, got {result}")


def errors(api, url):
    chat = api.chat.completions.create
    refused(openai.BadRequestError, 400, ["temperature"], lambda: chat(model=MODEL, messages=HELLO, temperature=9))
    refused(openai.BadRequestError, 400, ["max_tokens"], lambda: chat(model=MODEL, messages=HELLO, max_tokens=-1))
    refused(
        openai.BadRequestError,
        400,
        ["temperature"],
        lambda: list(chat(model=MODEL, messages=HELLO, temperature=9, stream=True)),
    )
    refused(
        openai.BadRequestError,
        400,
        ["3000", "2048"],
        lambda: api.completions.create(model=MODEL, prompt=[5] * 3000),
    )
    refused(openai.NotFoundError, 404, ["gpt-9"], lambda: chat(model="gpt-9", messages=HELLO))
    refused(
        openai.APIStatusError,
        413,
        ["100000"],
        lambda: api.completions.create(model=MODEL, prompt="x" * 200_000),
    )
    wrong = client(url, "sk-wrong")
    refused(
        openai.AuthenticationError, 401, [], lambda: wrong.chat.completions.create(model=MODEL, messages=HELLO)
    )


def broken_stream(api):
    """Reads a long answer until its worker dies: the client must learn of it as an APIError."""
    stream = api.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        max_tokens=1900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    try:
        for number, _ in enumerate(stream):
            if number == 2:
                print("streaming")
    except openai.APIConnectionError as error:
        raise AssertionError("the connection broke without an error event") from error
    except openai.APIError as error:
        print(f"APIError in the stream: {error.message}")
    else:
        raise AssertionError("the stream ended as if all were well")


def no_worker(api):
    try:
        api.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
    except openai.InternalServerError as error:
        assert error.status_code in (502, 503), error
        print(f"InternalServerError {error.status_code}: {error.body['message']}")
    else:
        raise AssertionError("an answer without a worker")


def main():
    url, scenario, key = sys.argv[1:]
    api = client(url, key)
    {
        "answers": lambda: answers(api),
        "errors": lambda: errors(api, url),
        "broken-stream": lambda: broken_stream(api),
        "no-worker": lambda: no_worker(api),
    }[scenario]()


if __name__ == "__main__":
    main()
