package setup

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
)

// The names of the socket and the files that a daemon makes in the folder of its configuration.
const (
	cloudSocket   = "cloud.sock"
	edgeSocket    = "edge.sock"
	inventoryFile = "nodes.json"
	forwardsFile  = "forwards.toml"
)

// longestSocket is the longest path of a unix socket that every system permits, in bytes. macOS permits 104 bytes
// with the final zero byte, Linux 108 (unix(7)).
const longestSocket = 103

// unitSocket is the admin socket of a daemon that systemd runs. The unit makes the folder (RuntimeDirectory=).
func unitSocket(mode string) string { return "/run/tunnel-" + mode + "/admin.sock" }

// socketLine returns the line that names the admin socket, for a configuration in dir. If the system could not
// open the socket, socketLine returns the line as a TOML comment.
func socketLine(mode, dir, name string, systemd bool) string {
	switch {
	case systemd:
		return fmt.Sprintf("socket = %q", unitSocket(mode))
	case runtime.GOOS == "windows", len(filepath.Join(dir, name)) > longestSocket:
		return fmt.Sprintf("#socket = %q", unitSocket(mode))
	}
	return fmt.Sprintf("socket = %q", name)
}

// moveSocket returns text, a configuration, with unitSocket as the path of the admin socket. If an operator has
// changed the line of the socket, the line stays.
func moveSocket(text, mode, name string) string {
	return strings.Replace(text, fmt.Sprintf("\nsocket = %q\n", name), fmt.Sprintf("\nsocket = %q\n", unitSocket(mode)), 1)
}
