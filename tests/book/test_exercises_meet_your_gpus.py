"""The checks of "Meet your GPUs": typical wrong answers are explained, other right ones taken."""

from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
)

SIGNATURES = {
    "emptiest_gpu": "devices",
    "physical": "i, visible",
    "strays": "net, device",
}
WRONG = [
    ("emptiest_gpu", "return min(devices, key=lambda d: torch.cuda.mem_get_info(d)[0])", "has the least free memory"),
    ("emptiest_gpu", "return max(range(len(devices)), key=lambda i: torch.cuda.mem_get_info(i)[0])", "is no device"),
    ("emptiest_gpu", "return devices[1]", "another GPU has"),
    ("emptiest_gpu", "return min(devices, key=torch.cuda.memory_allocated)", "Others use this machine, too"),
    ("emptiest_gpu", "return min(devices, key=torch.cuda.memory_reserved)", "Others use this machine, too"),
    (
        "emptiest_gpu",
        """
        count = torch.cuda.device_count()
        return torch.device('cuda', max(range(count), key=lambda i: torch.cuda.mem_get_info(i)[0]))""",
        "one of the devices that were passed",
    ),
    ("strays", "return [n for n, p in net.named_parameters() if p.device != device]", "buffers, such as"),
    ("strays", "return [n for n, p in net.named_parameters() if p.device.type != device.type]", "not its type"),
    ("strays", "return [p for p in net.parameters() if p.device != device]", "not the tensors"),
    ("strays", "return [n for n, p in net.named_parameters() if p.device == device]", "all of the network is on"),
    (
        "strays",
        "return [] if net[2].weight.device == device else [n for n, _ in net.named_parameters()]",
        "only 2.weight",
    ),
    ("physical", "return visible.split(',')[i]", "turn it into a number"),
    ("physical", "return i", "numbers what it sees from 0 on"),
    ("physical", "return int(visible[2 * i])", "numbers what it sees from 0 on"),
    ("physical", "return visible.split(',').index(str(i))", "numbers what it sees from 0 on"),
]
RIGHT = [
    ("strays", "return [name for name, tensor in net.state_dict().items() if tensor.device != device]"),
    ("emptiest_gpu", "return max(devices, key=lambda device: torch.cuda.mem_get_info(device)[0])"),
    ("physical", "return int(visible.split(',')[i])"),
]
