# kvpool with CUDA. From the root of a checkout: docker build -f docker/cuda.Dockerfile -t kvpool-cuda .
# The driver is the host's: docker run --gpus all --ulimit memlock=-1 kvpool-cuda
# The extra brings CUDA's headers and libraries, so the image needs no toolkit. It has not run on a GPU.
FROM python:3.11-slim
ARG CUDA=cuda13
COPY . /src
WORKDIR /src
RUN pip install --no-cache-dir ".[cli,events,metrics,remote,stores,${CUDA}]"
RUN python -m kvpool warm-up --into /opt/kvpool-code
ENV KVPOOL_CACHE_DIR=/opt/kvpool-code
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /app
RUN useradd --create-home --uid 10001 kvpool
USER 10001
ENTRYPOINT ["kvpool"]
CMD ["doctor", "--device", "cuda"]
