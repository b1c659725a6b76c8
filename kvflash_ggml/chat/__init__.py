"""Chat templates of every model family: messages and tools to a prompt, an answer's text to content and calls.

`templates.py` asks llama.cpp's own `common/chat` through `native/chat.py`. `reader.py` reads one answer while it is
written, and imports nothing that is built. An endpoint of the server takes these steps:

    requests, rendered = await prepared(front, http, asked)  # server/chat.py, of a ChatRequest
    reader = rendered.reader()                               # one for each answer
    for piece in pieces:
        for delta in reader.push(piece.text): ...
    for delta in reader.push("", end=True): ...
    reader.said                                              # the whole answer

Nothing that a model says is lost: text that the parser of its family does not understand is content as it stands.
"""
