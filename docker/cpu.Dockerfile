# kvpool on a CPU. From the root of a checkout: docker build -f docker/cpu.Dockerfile -t kvpool .
FROM python:3.11-slim
COPY . /src
WORKDIR /src
RUN pip install --no-cache-dir ".[cli,events,metrics,remote,stores]"
# The code fits the processor that builds the image; another kind of processor compiles anew.
RUN python -m kvpool warm-up --into /opt/kvpool-code
ENV KVPOOL_CACHE_DIR=/opt/kvpool-code
WORKDIR /app
RUN useradd --create-home --uid 10001 kvpool
USER 10001
RUN python -m kvpool replay --limit 20 --verify
ENTRYPOINT ["kvpool"]
CMD ["doctor", "--device", "cpu"]
