"""An exception under torch's @record, with a message and a cause of its own."""

from torch.distributed.elastic.multiprocessing.errors import record


def parse(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise RuntimeError("the configuration cannot be read") from error


@record
def main() -> None:
    parse("three")


if __name__ == "__main__":
    main()
