# Writes a file's bytes as C++: cmake -DIMAGE=file -DSOURCE=file.cc -P EmbedImage.cmake
file(READ ${IMAGE} hex HEX)
string(LENGTH "${hex}" digits)
math(EXPR nbytes "${digits} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" hex "${hex}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${SOURCE} "#include \"gpu/kernels.h\"
namespace unicron::gpu {
alignas(16) extern const unsigned char kKernelImage[${nbytes}] = {
${bytes}};
extern const size_t kKernelImageBytes = ${nbytes};
}  // namespace unicron::gpu
")
