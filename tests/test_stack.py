"""Stacked networks equal separate ones: outputs, gradients, spectral vectors and steps of Adam."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpgen_bench.nets.g_pate import ConvTeacher
from dpgen_bench.nets.latents import draw_latents
from dpgen_bench.nets.spectral import settle_spectral
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.teachers import DenseTeacher, score_gradients, update_teachers
from dpgen_bench.nets.wasserstein import CriticTraining, draw_batch
from dpgen_bench.nets.wgan import DCGANGenerator, ProjectionCritic, ResNetGenerator

SHAPE, CLASSES = (1, 28, 28), 3


def critic():
    return ProjectionCritic(SHAPE, CLASSES, width=4)


def rng(count, seed=0):
    return [torch.Generator().manual_seed(seed + number) for number in range(count)]


def records(count, n=9):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.rand(n, *SHAPE, generator=generator), torch.randint(CLASSES, (n,), generator=generator))
        for _ in range(count)
    ]


def separate(tensors, place, make=critic, lr=1e-3, betas=(0.5, 0.9)):
    """Network number `place` of a stack, as a module with an optimiser of its own."""
    net = make()
    net.load_state_dict({name: value[place] for name, value in tensors.items()})
    return net, torch.optim.Adam(net.parameters(), lr, betas)


def train_separately(net, adam, training, own, fake, torch_rng):
    """The text's critic update, one network, PyTorch's modules and autograd."""
    for _ in range(training.n_critic):
        real, labels = draw_batch(own, training.batch_size, torch_rng)
        mix = torch.rand(training.batch_size, 1, 1, 1, generator=torch_rng)
        images = fake(
            draw_latents(training.latent, (training.batch_size, training.latent_dim), torch_rng, real.device),
            labels,
        )
        net.train()
        real_scores, fake_scores = net(torch.cat([real, images]), labels.repeat(2)).chunk(2)
        net.eval()  # the update's one power iteration is done
        between = (mix * real + (1 - mix) * images).requires_grad_()
        (slopes,) = torch.autograd.grad(net(between, labels).sum(), between, create_graph=True)
        penalty = ((slopes.flatten(1).norm(dim=1) - 1) ** 2).mean()
        loss = fake_scores.mean() - real_scores.mean() + training.gp_weight * penalty
        loss = loss + training.drift * (real_scores**2).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()


def bright(z, labels):
    """Images that are a simple function of (z, labels), for a stack or one network."""
    return (z.mean(-1) + labels).sigmoid()[..., None, None, None].expand(*labels.shape, *SHAPE)


@pytest.mark.parametrize("count", [1, 3])
def test_critics_trained_together_equal_critics_trained_separately(count):
    training = CriticTraining(batch_size=5, n_critic=4, lr=1e-3)
    first = Stack.initial(critic, rng(count))
    together = training.stack(critic(), first)
    own = records(count)
    training.improve(together, own, bright, rng(count, seed=50))
    after = together.tensors(adam=True)
    for place in range(count):
        net, adam = separate(first, place)
        train_separately(net, adam, training, own[place], bright, rng(count, seed=50)[place])
        for name, value in net.state_dict().items():
            assert torch.allclose(after[name][place], value, atol=1e-5), name
            assert value.numel() == 1 or not torch.equal(first[name][place], value), f"{name} was not trained"
        for name, parameter in net.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                scale = float(adam.state[parameter][key].abs().max())
                assert torch.allclose(after[f"{key}.{name}"][place], adam.state[parameter][key], atol=1e-5 * scale), (
                    name
                )
        assert float(after["step"][place]) == 4.0 == float(adam.state[parameter]["step"])


@pytest.mark.parametrize("teacher", [DenseTeacher, ConvTeacher])
def test_shared_inputs_give_what_copies_of_them_give(teacher):
    networks = Stack(
        teacher(SHAPE, CLASSES), Stack.initial(lambda: teacher(SHAPE, CLASSES), rng(3)), lr=1e-3, betas=(0.5, 0.9)
    )
    images, labels = records(1)[0]
    shared, copies = networks.on_same(images, labels), networks(images.expand(3, *images.shape), labels.expand(3, -1))
    assert shared.shape == copies.shape == (3, 9)
    assert not torch.equal(shared[0], shared[1]), "the networks are one network"
    torch.testing.assert_close(shared, copies, atol=1e-6, rtol=1e-5)
    parameters, weights = list(networks.parameters.values()), torch.randn(3, 9, generator=rng(1)[0])
    pairs = zip(
        *(torch.autograd.grad((weights * logits).sum(), parameters) for logits in (shared, copies)), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    copies = images.expand(3, *images.shape).clone().requires_grad_()
    expected = torch.autograd.grad(F.logsigmoid(networks(copies, labels.expand(3, -1))).mean(dim=1).sum(), copies)[0]
    directions = networks.gradients_on_same(lambda logits: F.logsigmoid(logits).mean(), images, labels)
    assert float(expected.abs().max()) > 1e-4
    torch.testing.assert_close(directions, expected, atol=1e-8, rtol=1e-4)


def test_a_step_does_not_depend_on_how_tensors_lie_in_memory():
    """Adam's fused step reads parameters, moments and gradients in the order of memory."""
    images, labels = records(1)[0]

    def after_steps(tensors):
        networks = Stack(ConvTeacher(SHAPE, CLASSES), tensors, lr=1e-3, betas=(0.5, 0.9))
        for _ in range(2):
            networks.descend(networks.on_same(images, labels).square().mean(dim=1))
        return networks.tensors(adam=True)

    def transposed(tensors):
        return {name: value.mT.contiguous().mT if value.ndim > 2 else value for name, value in tensors.items()}

    first = after_steps(Stack.initial(lambda: ConvTeacher(SHAPE, CLASSES), rng(2)))
    expected, given = after_steps(first), after_steps(transposed(first))
    assert not transposed(first)["linear.weight"].is_contiguous()
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, msg=name)


@pytest.mark.parametrize("teacher", [DenseTeacher, ConvTeacher])
def test_teachers_see_all_records_and_all_generated_images(teacher):
    """Four records and seven images, against a module of its own."""
    first = Stack.initial(lambda: teacher(SHAPE, CLASSES), rng(2))
    own, (fake, labels) = records(2), (images[:7] for images in records(1, n=9)[0])
    together = Stack(teacher(SHAPE, CLASSES), first, lr=1e-3, betas=(0.5, 0.9))
    update_teachers(together, own, rng(2, seed=9), fake, labels, batch_size=4)
    for place, stream in enumerate(rng(2, seed=9)):
        net, adam = separate(first, place, lambda: teacher(SHAPE, CLASSES))
        on_real, on_fake = net(*draw_batch(own[place], 4, stream)), net(fake, labels)
        (-F.logsigmoid(on_real).mean() - F.logsigmoid(-on_fake).mean()).backward()
        adam.step()
        # Gradients, as Adam's first moments. Its first step is their sign, also of rounded zeros.
        for name, parameter in net.named_parameters():
            moment, expected = together.tensors(adam=True)[f"exp_avg.{name}"][place], adam.state[parameter]["exp_avg"]
            assert float(expected.abs().max()) > 0.0
            torch.testing.assert_close(moment, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4, msg=name)


@pytest.mark.parametrize("teacher", [DenseTeacher, ConvTeacher])
@pytest.mark.parametrize("n", [3, 9])
def test_a_teacher_does_not_depend_on_the_records_of_another(teacher, n):
    """Bit by bit, votes and Adam's moments included, for batches with repetition (n = 3) and without."""
    first = Stack.initial(lambda: teacher(SHAPE, CLASSES), rng(3))
    own, (fake, labels) = records(3, n=n), (images[:7] for images in records(1)[0])

    def after_steps(shards):
        together = Stack(teacher(SHAPE, CLASSES), first, lr=1e-2, betas=(0.5, 0.9))
        rngs = rng(3, seed=9)
        for _ in range(3):
            update_teachers(together, shards, rngs, fake, labels, batch_size=5)
        answers = {"scores": together.on_same(fake, labels), "directions": score_gradients(together, fake, labels)}
        return answers | together.tensors(adam=True)

    expected = after_steps(own)
    images, classes = own[1]
    changed = torch.cat([1.0 - images[:1], images[1:]])
    others = (images[:0], classes[:0]), (images[1:], classes[1:]), (changed, classes), (images * torch.nan, classes)
    for other in others:
        after = after_steps([own[0], other, own[2]])
        for name, value in after.items():
            assert torch.equal(value[0], expected[name][0]), name
            assert torch.equal(value[2], expected[name][2]), name
        assert not torch.equal(after["scores"][1], expected["scores"][1]), "the other teacher did not change"


def test_a_stack_continues_from_its_tensors():
    training = CriticTraining(batch_size=5, n_critic=2, lr=1e-3)
    own, first = records(2), Stack.initial(critic, rng(2))
    whole, halves = training.stack(critic(), first), training.stack(critic(), first)
    stream, other = rng(2, seed=9), rng(2, seed=9)
    training.improve(whole, own, bright, stream)
    training.improve(whole, own, bright, stream)
    training.improve(halves, own, bright, other)
    halves = training.stack(critic(), halves.tensors(adam=True))
    training.improve(halves, own, bright, other)
    for name, value in whole.tensors(adam=True).items():
        assert torch.equal(halves.tensors(adam=True)[name], value), name


def test_one_critic_of_a_stack_continues_alone():
    """As in GS-WGAN's main loop: warm-started together, then each on its own."""
    training = CriticTraining(batch_size=5, n_critic=2, lr=1e-3)
    own = records(3)
    tensors = training.warm_start(critic, lambda: DCGANGenerator(SHAPE, CLASSES, width=2), 1, CLASSES, own, rng(3))
    assert not [name for name in tensors if name.startswith(("exp_avg", "step"))]
    alone = training.stack(critic(), {name: value[1:2] for name, value in tensors.items()})
    all_three = training.stack(critic(), tensors)
    training.improve(alone, own[1:2], bright, rng(3, seed=30)[1:2])
    training.improve(all_three, own, bright, rng(3, seed=30))
    for name, value in alone.tensors(adam=True).items():
        assert torch.allclose(all_three.tensors(adam=True)[name][1], value[0], atol=1e-5), name


@pytest.mark.parametrize("generator", [DCGANGenerator, ResNetGenerator])
def test_warm_start_together_equals_separate_warm_starts(generator):
    """Critics and temporary generators, with their spectral vectors, in one stack and one by one."""
    training = CriticTraining(batch_size=4, n_critic=2, lr=1e-3)

    def start(own, torch_rng):
        return training.warm_start(critic, lambda: generator(SHAPE, CLASSES, width=4), 2, CLASSES, own, torch_rng)

    own = records(3)
    together = start(own, rng(3))
    for place in range(3):
        separate = start(own[place : place + 1], rng(3)[place : place + 1])
        for name, value in separate.items():
            assert torch.allclose(together[name][place], value[0], atol=1e-5), name


def test_warm_start_depends_on_its_own_records_alone():
    """Bit by bit, even if the other shard is empty, or has NaN and infinite pixels."""
    training = CriticTraining(batch_size=4, n_critic=1)
    make = (critic, lambda: DCGANGenerator(SHAPE, CLASSES, width=2))
    own = records(2)
    first = training.warm_start(*make, 2, CLASSES, own, rng(2))
    empty = (own[1][0][:0], own[1][1][:0])
    odd = (torch.full_like(own[1][0], torch.nan), own[1][1])
    for other in (empty, odd, (own[1][0] * 1e30, own[1][1])):
        second = training.warm_start(*make, 2, CLASSES, [own[0], other], rng(2))
        for name, value in second.items():
            assert torch.equal(value[0], first[name][0]), name
            assert bool(torch.isfinite(value).all()), name


def test_temporary_generators_climb_the_scores_of_their_critics(monkeypatch):
    """With critics at rest; scores of images with fixed latents and labels."""
    monkeypatch.setattr(CriticTraining, "improve", lambda self, *args: None)
    training = CriticTraining(batch_size=8, latent_dim=10, lr=1e-2)
    critics = training.stack(critic(), Stack.initial(critic, rng(2)))

    def generator():
        return DCGANGenerator(SHAPE, CLASSES, width=2)

    generators = training.stack(generator(), Stack.initial(generator, rng(2, seed=20)))
    z, labels = draw_latents("bernoulli", (2, 8, 10), rng(1)[0], torch.device("cpu")), torch.arange(16).view(2, 8) % 3
    scores = []
    for _ in range(10):
        scores.append(critics(generators(z, labels), labels).detach().mean(1))
        training.iterate(critics, generators, CLASSES, records(2), rng(2))
    assert bool((scores[-1] > scores[0]).all())
    assert float((scores[-1] - scores[0]).min()) > 0.1 * float(scores[0].abs().max()), scores


def test_warm_start_does_not_change_public_randomness():
    before = torch.get_rng_state()
    training = CriticTraining(batch_size=4, n_critic=1)
    training.warm_start(critic, lambda: DCGANGenerator(SHAPE, CLASSES, width=2), 1, CLASSES, records(2), rng(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_no_warm_start_is_the_initial_critic():
    training = CriticTraining()
    tensors = training.warm_start(critic, lambda: DCGANGenerator(SHAPE, CLASSES), 0, CLASSES, records(2), rng(2))
    for name, value in Stack.initial(critic, rng(2)).items():
        assert torch.equal(tensors[name], value)
    assert not torch.equal(tensors["linear.bias"][0], tensors["linear.bias"][1])


def test_warm_start_distinguishes_records_from_generated_images():
    """A critic of bright records gives bright images the higher score, one of dark records the lower."""
    training = CriticTraining(batch_size=8, lr=1e-3)
    light = (torch.full((20, *SHAPE), 0.9), torch.zeros(20, dtype=torch.int64))
    dark = (torch.full((20, *SHAPE), 0.1), torch.zeros(20, dtype=torch.int64))
    tensors = training.warm_start(
        critic, lambda: DCGANGenerator(SHAPE, CLASSES, width=4), 15, CLASSES, [light, dark], rng(2)
    )
    critics = training.stack(critic(), tensors)
    images = torch.stack([torch.cat([light[0][:1], dark[0][:1]])] * 2)
    scores = critics(images, torch.zeros(2, 2, dtype=torch.int64))
    assert scores[0, 0] > scores[0, 1]
    assert scores[1, 0] < scores[1, 1]


def test_image_gradient_is_autograds():
    training = CriticTraining()
    tensors = Stack.initial(critic, rng(2))
    x, y = torch.rand(2, 5, *SHAPE), torch.randint(CLASSES, (2, 5))
    gradient = training.image_gradient(training.stack(critic(), tensors), x, y)
    for place in range(2):
        net, _ = separate(tensors, place)
        net.train()
        images = x[place].clone().requires_grad_()
        (-net(images, y[place]).sum()).backward()
        assert torch.allclose(gradient[place], images.grad, atol=1e-6)


def test_loss_of_a_linear_critic_is_in_closed_form():
    """D(x) = <w, x>: E D(fake) - E D(real) + λ (|w| - 1)² + drift E D(real)²."""

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(SHAPE))

        def forward(self, x, y):
            return (x * self.w).flatten(1).sum(1)

    training = CriticTraining(gp_weight=3.0, drift=0.5)
    critics = training.stack(Linear(), Stack.initial(Linear, rng(2)))
    real, fake = torch.rand(2, 6, *SHAPE), torch.rand(2, 6, *SHAPE)
    labels, mix = torch.zeros(2, 6, dtype=torch.int64), torch.rand(2, 6, 1, 1, 1)
    w = critics.parameters["w"]
    scores_real, scores_fake = (torch.einsum("gbchw,gchw->gb", images, w) for images in (real, fake))
    penalty = (w.flatten(1).norm(dim=1) - 1) ** 2
    expected = scores_fake.mean(1) - scores_real.mean(1) + 3.0 * penalty + 0.5 * scores_real.square().mean(1)
    assert torch.allclose(training.loss(critics, real, fake, labels, mix), expected, rtol=1e-4)


@pytest.mark.parametrize(("n", "size"), [(9, 5), (5, 5), (3, 5), (1, 5), (0, 5)])
def test_batches_have_exactly_the_requested_size(n, size):
    images = torch.arange(float(n)).reshape(n, 1, 1, 1) / 10
    drawn, labels = draw_batch((images, torch.arange(n)), size, rng(1)[0])
    assert len(drawn) == len(labels) == size
    if n >= size:
        assert len(set(labels.tolist())) == size, "without replacement"
    if n:
        assert torch.equal(drawn.flatten(), labels / 10)


def test_batches_are_of_pixels():
    odd = torch.tensor([float("nan"), 1e30, -5.0, float("inf"), 0.5]).reshape(5, 1, 1, 1)
    drawn, labels = draw_batch((odd, torch.arange(5)), 5, rng(1)[0])
    assert torch.equal(drawn.flatten()[labels.argsort()], torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5]))


def test_latents_follow_their_law():
    """40,000 values: the margins are 8 and 5.7 standard errors, false alarm below 2e-8."""
    bernoulli = draw_latents("bernoulli", (4000, 10), rng(1)[0], torch.device("cpu"))
    assert set(bernoulli.unique().tolist()) == {0.0, 1.0}
    assert abs(float(bernoulli.mean()) - 0.5) < 0.02
    normal = draw_latents("normal", (4000, 10), rng(1)[0], torch.device("cpu"))
    assert abs(float(normal.std()) - 1.0) < 0.02


def test_settled_vectors_give_the_largest_singular_value():
    """Of weights whose second singular value is at most 0.9 of the largest: 100 iterations leave 0.9^100 of it."""
    net = ResNetGenerator(SHAPE, CLASSES, width=4).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            noisy = parameter + 0.5 * torch.randn(parameter.shape, generator=rng(1)[0])
            if parameter.ndim > 1:
                left, values, right = torch.linalg.svd(noisy.flatten(1), full_matrices=False)
                values[1:].clamp_(max=0.9 * float(values[0]))
                noisy = (left * values @ right).reshape(parameter.shape)
            parameter.copy_(noisy)
    before = copy.deepcopy(net.state_dict())
    assert settle_spectral(net) is net
    for name, layer in net.named_modules():
        if hasattr(layer, "parametrizations"):
            assert float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), ord=2)) == pytest.approx(
                1.0, abs=1e-3
            ), name
    assert all(torch.equal(before[name], value) for name, value in net.named_parameters())


def test_networks_are_initialised_without_the_generators_of_gpus(monkeypatch):
    """torch.manual_seed would seed them, and a private function that changes them is refused."""

    def seeded(seed: int) -> None:
        raise AssertionError("a generator of a GPU was seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    first, again = (Stack.initial(critic, rng(2)) for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_an_accelerator_trains_the_same_critics():
    """To float32: convolutions without TF32, the same randomness, because it is drawn on the CPU."""
    training = CriticTraining(batch_size=5, n_critic=3, lr=1e-3)
    first, own = Stack.initial(critic, rng(3)), records(3)
    on_cpu = training.stack(critic(), first)
    on_gpu = training.stack(critic().cuda(), {name: value.cuda() for name, value in first.items()})
    training.improve(on_cpu, own, bright, rng(3, seed=40))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        training.improve(on_gpu, [(x.cuda(), y.cuda()) for x, y in own], bright, rng(3, seed=40))
    for name, value in on_cpu.tensors(adam=False).items():
        assert torch.allclose(on_gpu.tensors(adam=False)[name].cpu(), value, atol=1e-4), name
