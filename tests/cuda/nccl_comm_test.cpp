// The end of NCCL's communicator while another thread is in it. One GPU suffices.
#include "cuda/nccl/comm.h"

#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "../ranks/ranks.h"
#include "cuda_test.h"

namespace fusedmoe::testing {
namespace {

TEST(CudaNcclCommTest, ItGoesWhenTheLastThreadHasLeft) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  if (!nccl_info().problem.empty()) GTEST_SKIP() << nccl_info().problem;
#if FUSEDMOE_HAVE_NCCL
  const auto control = make_thread_control_plane();
  ncclUniqueId id{};
  ASSERT_EQ(cuda::nccl().ncclGetUniqueId(&id), ncclSuccess);
  const Device device{DeviceKind::kCuda, 0};
  cuda::Connecting ranks("NCCL", 0, 1, *control, kPatient);
  const auto comm = cuda::connect_ranks(0, 1, device, id, ranks);
  std::latch entered(1), aborted(1);
  std::thread inside([&] {
    comm->group([&](ncclComm_t raw) {
      entered.count_down();
      aborted.wait();
      int size = 0;
      EXPECT_EQ(cuda::nccl().ncclCommCount(raw, &size), ncclSuccess);
      EXPECT_EQ(size, 1);
    });
  });
  entered.wait();
  comm->abort();
  EXPECT_FALSE(comm->destroy(kImpatient)) << "a thread is in it";
  aborted.count_down();
  inside.join();
  EXPECT_TRUE(comm->destroy(kPatient));
  EXPECT_THROW(comm->group([](ncclComm_t) {}), Error);
#endif
}

}  // namespace
}  // namespace fusedmoe::testing
