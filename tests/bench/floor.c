// The least that a shim, a pause program and a CNI plugin can do, as static C: floors for the benchmarks.
//   floor start SOCKET   listens there, forks one who waits to be killed, prints the address and exits
//   floor pause          waits to be killed
//   CNI_COMMAND=…        answers as a plugin that has nothing to do
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int listen_at(const char *path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  strncpy(address.sun_path, path, sizeof address.sun_path - 1);
  return fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 16);
}

static int plugin(const char *verb) {
  if (!strcmp(verb, "VERSION"))
    puts("{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[\"0.4.0\",\"1.0.0\"]}");
  else if (!strcmp(verb, "ADD"))
    puts("{\"cniVersion\":\"1.0.0\",\"interfaces\":[{\"name\":\"eth0\",\"sandbox\":\"/proc/self/ns/net\"}],"
         "\"ips\":[{\"address\":\"10.1.2.3/24\",\"interface\":0}]}");
  return 0;
}

int main(int argc, char **argv) {
  const char *verb = getenv("CNI_COMMAND");
  if (verb)
    return plugin(verb);
  if (argc > 2 && !strcmp(argv[1], "start")) {
    if (listen_at(argv[2]))
      return 1;
    if (fork()) {
      printf("unix://%s", argv[2]);
      return 0;
    }
    close(0), close(1), close(2);
    setsid();
  }
  for (;;)
    pause();
}
