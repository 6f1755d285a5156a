package setup

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
)

// The names of what Init and Join have a daemon keep beside its configuration.
const (
	cloudSocket   = "cloud.sock"
	edgeSocket    = "edge.sock"
	inventoryFile = "nodes.json"
	forwardsFile  = "forwards.toml"
)

// longestSocket is the longest path of a socket that every system permits, in bytes: macOS has 104 with a zero
// byte, Linux 108 (unix(7)).
const longestSocket = 103

// unitSocket is the admin socket of a daemon that systemd runs. The unit makes the folder (RuntimeDirectory=).
func unitSocket(mode string) string { return "/run/tunnel-" + mode + "/admin.sock" }

// socketLine returns the line of a configuration in dir that names the admin socket. If the system could not
// open the socket, the line is a comment.
func socketLine(mode, dir, name string, systemd bool) string {
	switch {
	case systemd:
		return fmt.Sprintf("socket = %q", unitSocket(mode))
	case runtime.GOOS == "windows", len(filepath.Join(dir, name)) > longestSocket:
		return fmt.Sprintf("#socket = %q", unitSocket(mode))
	}
	return fmt.Sprintf("socket = %q", name)
}

// moveSocket returns the text of a configuration with the admin socket where systemd runs the daemon. A line that
// an operator has changed stays.
func moveSocket(text, mode, name string) string {
	return strings.Replace(text, fmt.Sprintf("\nsocket = %q\n", name), fmt.Sprintf("\nsocket = %q\n", unitSocket(mode)), 1)
}
