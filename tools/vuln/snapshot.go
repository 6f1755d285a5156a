package main

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// snapshotPath is where the snapshot is, from the top of the repository.
const snapshotPath = "tools/vuln/snapshot.json"

//go:embed snapshot.json
var snapshotJSON []byte

// snapshot is the records of the Go vulnerability database that are about some modules.
type snapshot struct {
	License string
	Source  string // the commit that they were taken from
	Taken   string // its day
	Modules []string
	Records []json.RawMessage // as https://go.dev/doc/security/vuln/database defines them, without prose
}

// record is what we read of a record.
type record struct {
	SchemaVersion string   `json:"schema_version"`
	ID            string   `json:"id"`
	Modified      string   `json:"modified"`
	Withdrawn     string   `json:"withdrawn,omitempty"` // govulncheck passes over it then
	Aliases       []string `json:"aliases,omitempty"`
	Summary       string   `json:"summary"`
	Affected      []struct {
		Package struct {
			Name      string `json:"name"`
			Ecosystem string `json:"ecosystem"`
		} `json:"package"`
		Ranges   json.RawMessage `json:"ranges"`
		Specific json.RawMessage `json:"ecosystem_specific"`
	} `json:"affected"`
	Database json.RawMessage `json:"database_specific"`
}

func readSnapshot() (*snapshot, error) {
	s := new(snapshot)
	return s, json.Unmarshal(snapshotJSON, s)
}

// modules returns the names of the modules that we are made of and tested with.
func modules() ([]string, error) {
	names := []string{"stdlib", "toolchain"} // as the database calls Go itself
	for _, dir := range []string{".", "test/interop"} {
		var stderr bytes.Buffer
		cmd := exec.Command("go", "list", "-m", "-f", "{{.Path}}", "all")
		cmd.Dir, cmd.Stderr = dir, &stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list -m all in %s: %w: %s", dir, err, stderr.Bytes())
		}
		names = append(names, strings.Fields(string(out))...)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// covers returns an error when we depend on a module that nobody looked up.
func (s *snapshot) covers() error {
	names, err := modules()
	if err != nil {
		return err
	}
	names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(s.Modules, name) })
	if len(names) > 0 {
		return fmt.Errorf("vuln.go.dev cannot be reached, and %s does not cover %s; take it anew: go run ./tools/vuln "+
			"-take CLONE", snapshotPath, strings.Join(names, ", "))
	}
	return nil
}

// unpack writes the database that govulncheck can ask.
func (s *snapshot) unpack(dir string) error {
	type vuln struct {
		ID       string   `json:"id"`
		Modified string   `json:"modified"`
		Aliases  []string `json:"aliases,omitempty"`
	}
	type module struct {
		Path  string `json:"path"`
		Vulns []vuln `json:"vulns"`
	}
	files := make(map[string]any)
	var latest string
	all := []vuln{}
	byModule := make(map[string][]vuln)
	for _, raw := range s.Records {
		var r record
		if err := json.Unmarshal(raw, &r); err != nil {
			return err
		}
		latest = max(latest, r.Modified)
		v := vuln{ID: r.ID, Modified: r.Modified}
		for _, a := range r.Affected {
			if list := byModule[a.Package.Name]; len(list) == 0 || list[len(list)-1].ID != r.ID {
				byModule[a.Package.Name] = append(list, v)
			}
		}
		v.Aliases = r.Aliases
		all = append(all, v)
		files["ID/"+r.ID] = raw
	}
	index := []module{}
	for path, vulns := range byModule {
		index = append(index, module{path, vulns})
	}
	slices.SortFunc(index, func(a, b module) int { return cmp.Compare(a.Path, b.Path) })
	files["index/db"] = map[string]string{"modified": latest}
	files["index/modules"] = index
	files["index/vulns"] = all
	for name, content := range files {
		b, err := json.Marshal(content)
		if err != nil {
			return err
		}
		path := filepath.Join(dir, filepath.FromSlash(name)+".json")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// take writes the snapshot anew, from a clone of the database's repository.
func take(clone string) error {
	head, err := exec.Command("git", "-C", clone, "log", "-1", "--format=%H %cs").Output()
	if err != nil {
		return fmt.Errorf("%s is no clone of github.com/golang/vulndb: %w", clone, err)
	}
	commit, day, _ := strings.Cut(strings.TrimSpace(string(head)), " ")
	s := &snapshot{License: "CC BY 4.0, the Go vulnerability database, https://github.com/golang/vulndb",
		Source: commit, Taken: day}
	if s.Modules, err = modules(); err != nil {
		return err
	}
	paths, err := filepath.Glob(filepath.Join(clone, "data", "osv", "*.json"))
	if err != nil || len(paths) == 0 {
		return fmt.Errorf("%s has no data/osv: %w", clone, err)
	}
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var r record
		if err = json.Unmarshal(content, &r); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		ours := false
		for _, a := range r.Affected {
			ours = ours || slices.Contains(s.Modules, a.Package.Name)
		}
		if !ours {
			continue
		}
		short, err := json.Marshal(r)
		if err != nil {
			return err
		}
		s.Records = append(s.Records, short)
	}
	return os.WriteFile(snapshotPath, s.format(), 0o600)
}

// format writes a record to a line, so that changes can be read.
func (s *snapshot) format() []byte {
	head := *s
	head.Records = nil
	b, _ := json.MarshalIndent(head, "", " ") // strings alone
	b = bytes.TrimSuffix(b, []byte("null\n}"))
	b = append(b, "[\n"...)
	b = append(b, bytes.Join(rawLines(s.Records), []byte(",\n"))...)
	return append(b, "\n]}\n"...)
}

func rawLines(records []json.RawMessage) [][]byte {
	lines := make([][]byte, len(records))
	for i, r := range records {
		lines[i] = r
	}
	return lines
}
