# Built and run by buildah 1.28, with Debian's Python 3.11 for python:3.12-slim-bookworm. Docker has not built it yet.
# A server on the CPU, whichever the host has:
#   docker build -t kvflash .
#   docker run -p 8080:8080 -v "$PWD/models:/models:ro" kvflash /models/model.gguf --kvflash 8K --api-key SECRET
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends cmake g++ git ninja-build \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN /source/scripts/wheel /dist

FROM python:3.12-slim-bookworm
COPY --from=build /dist /tmp/dist
RUN pip install --no-cache-dir /tmp/dist/*.whl "kvflash-ggml[server,hub]" \
    && rm -r /tmp/dist \
    && useradd --create-home kvflash
USER kvflash
WORKDIR /home/kvflash
ENV KVFLASH_HOST=0.0.0.0 KVFLASH_PORT=8080
EXPOSE 8080
HEALTHCHECK --start-period=2m CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://localhost:{os.environ[\"KVFLASH_PORT\"]}/health')"]
ENTRYPOINT ["kvflash-run", "serve"]
