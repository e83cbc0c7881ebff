"""A service without HTTP: jobs come through a queue, workers send their results.

KAFKA_BOOTSTRAP_SERVERS=localhost:9092 python examples/03_background_worker.py

SIGTERM (what Kubernetes and systemd send) or Ctrl-C: no new jobs are taken, those that are
there are finished, and the last line tells what became of the records. For Unix: on Windows
asyncio has no signal handlers.
"""

import asyncio
import os
import signal

from asyncproducer import KafkaError, Producer

SERVERS = os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092")
WORKERS = 20
#: Together less than the platform waits between SIGTERM and SIGKILL.
FINISH_SECONDS, CLOSE_SECONDS = 10, 10


async def receive(queue: asyncio.Queue[int]) -> None:
    """Stands for your source of jobs: a socket, a webhook, a database."""
    job = 0
    while True:
        await queue.put(job)  # waits when the workers are behind: the queue is bounded
        job += 1
        await asyncio.sleep(0.001)


async def work(queue: asyncio.Queue[int], producer: Producer) -> None:
    while True:
        job = await queue.get()
        try:
            await producer.send("results", f"result of job {job}", key=str(job % 10))
        except KafkaError as error:
            print(f"job {job} has no result in Kafka: {error}")  # or: into a dead letter store
        finally:
            queue.task_done()


async def main() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1000)
    async with Producer(SERVERS) as producer:
        await producer.warm_up("results")
        source = asyncio.create_task(receive(queue))
        workers = [asyncio.create_task(work(queue, producer)) for _ in range(WORKERS)]
        print("ready", flush=True)
        await stop.wait()

        source.cancel()  # 1. nothing new
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await queue.join()  # 2. what is there: each job has its result, or its error
        except TimeoutError:
            print(f"{queue.qsize()} jobs were not done")
        for worker in workers:
            worker.cancel()
        await asyncio.gather(source, *workers, return_exceptions=True)
        report = await producer.close(CLOSE_SECONDS)  # 3. what is still on its way
        print(f"stopped: {report.acknowledged} acknowledged, {report.failed} failed")


if __name__ == "__main__":
    asyncio.run(main())
