package setup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// cloudStateDir is the folder for the cloud's private files if systemd runs the cloud: keys and the token file.
// At every start of the cloud, systemd makes the unit's user the owner of this folder. The user may write to no
// other folder.
const cloudStateDir = "/var/lib/tunnel-cloud"

// maxMoved is the longest file that adopt moves or copies, in bytes. An inventory has some hundred bytes for each node.
const maxMoved = 64 << 20

// adopt makes the folder of an earlier Init usable for a cloud that systemd runs. In that folder, only root may read
// the keys, the token file and the file with the uses of tokens. So adopt moves these files to the state folder,
// where the unit's user can read them, and writes their new paths into cloud.toml. Their content stays the same. A
// path that an operator has changed in cloud.toml stays, too. If the folder has no cloud.toml, adopt does nothing and
// returns there = false.
func (c *cloudFolder) adopt() (there bool, err error) {
	config := filepath.Join(c.dir, cloudFile)
	text, err := os.ReadFile(config)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	is, others, err := conf.ReadCloud(config, c.Host.Env)
	if err == nil && len(others) > 0 {
		err = others // the unit could not start
	}
	if err != nil {
		return true, configError(fmt.Errorf("%s exists and cannot be used: %w", config, err))
	}
	if err = c.checkAdopted(config, is); err != nil {
		return true, err
	}
	edited := string(text)
	var old []string // paths of the files that move
	move := func(from, to string) error {
		content, _, failed := tunnel.ReadFile(from, maxMoved)
		if failed != nil {
			return failed
		}
		old = append(old, from)
		c.files = append(c.files, newFile{
			name: to, what: "was " + from, mode: secretFile, content: content, given: true,
		})
		return nil
	}
	for _, f := range []struct{ key, path, name string }{
		{"key", is.Server.Key, cloudKeyFile},
		{"cakey", is.Join.CAKey, nodesKeyFile},
		{"tokenfile", is.Server.TokenFile, tokensFile},
	} {
		from, to := filepath.Join(c.dir, f.name), filepath.Join(c.state, f.name)
		if f.path != from {
			continue // an earlier init has moved the file, or an operator has named another file
		}
		if edited, err = replaceValue(edited, f.key, f.name, to); err != nil {
			return true, fmt.Errorf("%s: %w", config, err)
		}
		if err = move(from, to); err != nil {
			return true, err
		}
		if f.name == tokensFile { // without the uses, a token for several nodes that is used up would be good again
			err = move(auth.UsesFile(from), auth.UsesFile(to))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return true, err
			}
		}
	}
	if old == nil {
		return true, nil
	}
	if edited, err = c.moveOperated(edited, is); err != nil {
		return true, fmt.Errorf("%s: %w", config, err)
	}
	// adopt makes the new files first and removes the old files last. So the files that cloud.toml names exist even
	// after a failure.
	if err = createFiles(c.dir, c.files); err != nil {
		return true, err
	}
	if err = overwrite(config, newFile{mode: publicFile, content: []byte(edited)}); err != nil {
		c.undo(config, text)
		return true, err
	}
	c.files = append(c.files, newFile{name: cloudFile, what: "the configuration, which names the new paths"})
	for _, path := range old {
		err = errors.Join(err, os.Remove(path))
	}
	return true, err
}

// undo removes the new files, unless cloud.toml may name them already: unless its content is still text. While the new
// files exist, another adopt would take them for the files of another cloud.
func (c *cloudFolder) undo(config string, text []byte) {
	if now, err := os.ReadFile(config); err != nil || !bytes.Equal(now, text) {
		return
	}
	for _, f := range c.files {
		os.Remove(f.name) //nolint:errcheck // the caller reports the first error
	}
}

// moveOperated returns the text of cloud.toml with new paths of the admin socket, the inventory and the forwards,
// where the unit's user may write. It copies an inventory and a file of forwards that exist.
func (c *cloudFolder) moveOperated(text string, is *conf.Cloud) (string, error) {
	text = moveSocket(text, "cloud", cloudSocket)
	for _, written := range []struct{ key, name, path string }{
		{"inventory", inventoryFile, is.Inventory}, {"forwards", forwardsFile, is.Forwards},
	} {
		from, to := filepath.Join(c.dir, written.name), filepath.Join(c.state, written.name)
		if written.path != from {
			continue
		}
		var err error
		if text, err = replaceValue(text, written.key, written.name, to); err != nil {
			return "", err
		}
		content, _, err := tunnel.ReadFile(from, maxMoved)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return "", err
		}
		c.files = append(c.files, newFile{
			name: to, what: "a copy of " + from, mode: secretFile, content: content, given: true,
		})
	}
	return text, nil
}

// checkAdopted returns an error if the folder's cloud differs from the cloud that the command line describes.
func (c *cloudFolder) checkAdopted(config string, is *conf.Cloud) error {
	if is.Join.Address != c.Address {
		return fmt.Errorf("%s is for the address %q: write --address %[2]q, or choose another --dir",
			config, is.Join.Address)
	}
	certs, err := readCertificates("mode.cloud.stream.server: cert", is.Server.Cert)
	if err != nil {
		return configError(fmt.Errorf("%s: %w", config, err))
	}
	for _, host := range c.hosts {
		if err = certs[0].VerifyHostname(host); err != nil {
			return fmt.Errorf("%s exists and stays as it is, so --san changes nothing: %w", is.Server.Cert, err)
		}
	}
	return nil
}

// replaceValue replaces the line `key = "old"` of a TOML text by `key = "now"`. It fails unless there is one such line.
func replaceValue(text, key, old, now string) (string, error) {
	line := fmt.Sprintf("\n%s = %q\n", key, old)
	if strings.Count(text, line) != 1 {
		return "", fmt.Errorf("the unit's user cannot read %s: move that file to %s, and write %s = %q",
			old, filepath.Dir(now), key, now)
	}
	return strings.Replace(text, line, fmt.Sprintf("\n%s = %q\n", key, now), 1), nil
}
