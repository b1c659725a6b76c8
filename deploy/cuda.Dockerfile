# Not yet built: no machine with Docker and a GPU has tried this file.
# A server on CUDA, for the NVIDIA GPUs that ggml names where it is not built for one machine:
#   docker build -t kvflash-cuda -f deploy/cuda.Dockerfile .
#   docker run --gpus all -p 8080:8080 -v "$PWD/models:/models:ro" kvflash-cuda /models/model.gguf --api-key SECRET
ARG CUDA=12.8.1
ARG SYSTEM=ubuntu24.04

FROM nvidia/cuda:${CUDA}-devel-${SYSTEM} AS build
RUN apt-get update && apt-get install -y --no-install-recommends cmake g++ git ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
ENV CMAKE_ARGS="-DLLAMA_BUILD=OFF -DGGML_CUDA=on -DGGML_NATIVE=off"
RUN python3 -m venv /opt/kvflash && /opt/kvflash/bin/pip install --no-cache-dir "/source[server,hub]" "/source/fleet[s3]" /source/router

FROM nvidia/cuda:${CUDA}-runtime-${SYSTEM}
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home kvflash
COPY --from=build /opt/kvflash /opt/kvflash
USER kvflash
WORKDIR /home/kvflash
ENV PATH=/opt/kvflash/bin:$PATH KVFLASH_HOST=0.0.0.0 KVFLASH_PORT=8080
EXPOSE 8080
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://localhost:{os.environ[\"KVFLASH_PORT\"]}/health')"]
ENTRYPOINT ["kvflash-run", "serve"]
